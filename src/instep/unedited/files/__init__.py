"""Files of an unedited script: rank 0 changes the real ones, other ranks write into an overlay."""
