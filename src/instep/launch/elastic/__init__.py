"""Elastic jobs of `instep horovodrun`: ranks that end are replaced or given up, and others join."""
