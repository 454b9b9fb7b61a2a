"""INS1xx: ranks that wait for each other for ever, or that go on without each other."""
