"""Protects the files of images with a key: they are authenticated, and encrypted on request (docs/process-images.md).

Promises: a read with the key of an image returns what the owner wrote to this file of this image, or raises
`ImageError` before a byte is used. Not promised: that the image is the newest one, or that it still exists.
"""
