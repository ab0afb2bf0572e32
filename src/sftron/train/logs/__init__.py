"""What a run writes about itself: the console, its files of lines, and the loggers' copy of them."""
