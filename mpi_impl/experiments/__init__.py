"""Findings of the papers, in small: each file is one, a program for one rank or many, with a picture in the end."""
