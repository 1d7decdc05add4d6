"""What differs between the releases of the frameworks that Safepoint supports: one module for each framework.

The code detects a difference by the features of a release, such as a method or a parameter, and not by the number of
the release, because distributors backport features. A table at the top of each module names the releases that have a
difference, so that the code for this difference can be deleted when these releases are no longer supported. The
module `releases` names the oldest and the newest release that the tests ran with.
"""
