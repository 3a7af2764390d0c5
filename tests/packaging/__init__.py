"""What an installed farro is: its import, its files, its wheel."""
