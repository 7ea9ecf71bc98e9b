"""One self-contained HTML file about runs and evaluations: no script, no font and no image from anywhere else."""
