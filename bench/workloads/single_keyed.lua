-- One event per request, each with its own idempotency key.
-- RUN ends the key where tostring({}) would: an address may come again in the next run.
local run=os.getenv("RUN") or string.sub(tostring({}),10)
wrk.method="POST"; wrk.headers["Content-Type"]="application/json"
local counter=0; local id=0
function setup(thread) thread:set("id", id); id=id+1 end
function request()
  counter=counter+1
  -- No headers are passed: wrk would send those instead of its own, and lose the bearer token.
  return wrk.format("POST",nil,nil,'{"payload":"'..string.rep("x",82)..'","partition":0,"timestamp_ms":1700000000000,"idempotency_key":"k'..id..'-'..string.format("%d",counter)..'-table: 0x'..run..'"}')
end
function done(s,l,r)
  io.write(string.format("RESULT reqs=%d dur=%.3f non2xx=%d sockerr=%d p50_ms=%.3f p99_ms=%.3f max_ms=%.3f\n",
   s.requests,s.duration/1e6,s.errors.status,s.errors.connect+s.errors.read+s.errors.write+s.errors.timeout,l:percentile(50)/1000,l:percentile(99)/1000,l.max/1000))
end
