"""Who the ranks are and how they talk: from a launcher's variables to collectives.

It leans on `instep.process` only and knows nothing of models, batches or scripts. Begin with
`identity.launchers` (who am I), `rendezvous.bootstrap` (how ranks meet) and
`communication.transport` (what moves tensors).
"""
