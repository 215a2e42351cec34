"""The demo: a small real training run that is saved, loaded in a fresh process and proved equal to the bit."""
