"""Hidden states through a shared folder; importing this costs nothing (see :mod:`draftsmith_hs_file.plugin`)."""
