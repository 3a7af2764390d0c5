"""farro in other libraries: one file each, imported on demand."""
