"""Runs and splits for people: text for the terminal and plots."""
