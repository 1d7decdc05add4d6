"""What differs between the releases of the frameworks that Safepoint supports: one module for each framework.

A difference is found by what a release has, such as a method or a parameter, and not by its number: distributors
backport. Each entry names the releases for which it is there, so that it can be deleted when they are no longer
supported. `releases` has the oldest and the newest release that the tests ran with.
"""
