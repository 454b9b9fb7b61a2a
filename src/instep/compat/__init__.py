"""Other libraries' names, answered by instep: scripts written for them run unedited."""
