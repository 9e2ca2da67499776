"""One operation a file: its mathematics, a torch reference, and the function that chooses what runs."""
