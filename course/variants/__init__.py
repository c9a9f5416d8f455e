"""The differences between variants of the labs: a module for each lab, which `course/grading/variants.py` calls.

`draw(random)` returns texts of the lab's source, each of which must occur there, and what replaces them. Every draw
leaves out what the public variant has.
"""
