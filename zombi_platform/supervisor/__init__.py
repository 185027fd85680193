"""`zombi up`: every process of the platform on this machine under one supervisor.

`services` says what runs, `probes` when it answers, `children` starts one process and ends
it with all it started, `supervision` keeps them in order, `sessions` makes sure that
nothing outlives the supervisor. It knows programs and ports, not what they do.
"""
