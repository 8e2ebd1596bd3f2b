"""Proof that a sharded run equals the plain one. Reading order: order, sample, difference, tolerance, verdict, trace,
call, recorder, plain, alone, comparison, watched, session, subject, rank, run."""
