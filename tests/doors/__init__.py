"""What other packages do with our files, tested with the packages themselves: `make doors`."""
