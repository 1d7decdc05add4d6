"""What the ranks do together: their process group, the vote, and work whose error is raised on all ranks."""
