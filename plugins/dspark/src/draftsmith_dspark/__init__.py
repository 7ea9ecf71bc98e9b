"""DSpark for draftsmith: blocks, masks and backbone are DFlash's; each file here says what DSpark adds to it."""
