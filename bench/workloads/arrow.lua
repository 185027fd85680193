-- N events per request as an Arrow IPC stream; the body comes from the file named in BODY.
local file=assert(io.open(assert(os.getenv("BODY"),"BODY is not set"),"rb"))
wrk.method="POST"; wrk.headers["Content-Type"]="application/vnd.apache.arrow.stream"
wrk.body=file:read("*a")
file:close()
function done(s,l,r)
  io.write(string.format("RESULT reqs=%d dur=%.3f non2xx=%d sockerr=%d p50_ms=%.3f p99_ms=%.3f max_ms=%.3f\n",
   s.requests,s.duration/1e6,s.errors.status,s.errors.connect+s.errors.read+s.errors.write+s.errors.timeout,l:percentile(50)/1000,l:percentile(99)/1000,l.max/1000))
end
