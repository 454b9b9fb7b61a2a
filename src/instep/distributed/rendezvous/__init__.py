"""From a world to a process group: ranks find each other, and make sure that they are one job."""
