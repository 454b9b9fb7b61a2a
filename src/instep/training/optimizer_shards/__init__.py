"""An optimizer's step divided between the ranks (ZeRO stage 1): each rank keeps the state of its
part of the parameters, updates that part, and receives the others' parts."""
