-- One event per request, each with its own idempotency key; RUN keeps the keys of two runs apart.
local run=os.getenv("RUN") or tostring(os.time())
local head='{"payload":"'..string.rep("x",82)..'","partition":0,"timestamp_ms":1700000000000,"idempotency_key":"k'..run..'-'
local counter=0; local threads=0
wrk.method="POST"; wrk.headers["Content-Type"]="application/json"
function setup(thread) thread:set("id", threads); threads=threads+1 end
function request()
  counter=counter+1
  -- No headers are passed: wrk would send those instead of its own, and lose the bearer token.
  return wrk.format(nil,nil,nil,head..id..'-'..string.format("%d",counter)..'"}')
end
function done(s,l,r)
  io.write(string.format("RESULT reqs=%d dur=%.3f non2xx=%d sockerr=%d p50_ms=%.3f p99_ms=%.3f max_ms=%.3f\n",
   s.requests,s.duration/1e6,s.errors.status,s.errors.connect+s.errors.read+s.errors.write+s.errors.timeout,l:percentile(50)/1000,l:percentile(99)/1000,l.max/1000))
end
