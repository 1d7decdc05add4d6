"""Protects the files of images with a key: they are authenticated, and encrypted on request (docs/process-images.md).

Promises: what is read with the key of an image is what its owner wrote to this file of this image, or there is an
`ImageError`, before a byte of it is used. Not promised: that the image is the newest one, or that it still exists.
"""
