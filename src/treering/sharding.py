"""Shardings for whole trees."""
