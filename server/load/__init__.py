"""`vl2 bench serve`: a server of the OpenAI API under load, ours or another, seen from its clients.

`scenarios` says who asks what and when, `questions` makes it before the clock starts, `connection` sends
it and notes what comes with its time, `answer` reads that once the clock has stopped, `figures` makes numbers of it.
"""
