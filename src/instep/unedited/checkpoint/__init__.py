"""`instep run --checkpoint`: a script's own objects are saved after each iteration of its training
loop, and restored after the script has built them again.
"""
