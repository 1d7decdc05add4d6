"""What differs between the releases of the frameworks that Safepoint supports: one module for each framework.

The code detects a difference by the features of a release, such as a method or a parameter, and not by the number of
the release, because distributors backport features. Each entry names the releases that need the entry, so that the
entry can be deleted when they are no longer supported. `releases` has the oldest and the newest release that the
tests ran with.
"""
