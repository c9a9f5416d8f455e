"""Findings of the papers, reproduced at a small size: one program per file, for one rank or many, which draws a
picture.
"""
