"""Horovod's, Apex's and Jittor's interfaces, implemented by instep: scripts for them run unedited.

It leans on `instep.training` and `instep.distributed`. Begin with `finder` (which import gets which
package), then read the package of the library in question.
"""
