"""What looks without loading: listings, differences, verification, diagnosis."""
