-- uses: keys, numbers, server, requests, pending, ending, crashes
-- Handle expired leases, passed deadlines, delays that are over, and old dead letters.
-- ARGV  1 max crashes: lost leases after which a request becomes a dead letter, if it ran alone at the
--         last of them   2 limit a call
-- Reply {requests back to waiting, ended, dead, purged}

local max_crashes, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local dead_ttl = server.number('dead_ttl_ms', 1209600000) -- two weeks
server.write_needs_no_memory()
local returned, ended, dead, purged = pending.promote_delayed(), 0, 0, 0

for _, id in ipairs(server.due(keys.leases, server.now_text, limit)) do
  local fields = requests.read(id, 'state', 'payload', 'cancelled', 'score', 'tenant')
  if not fields or not (fields.state or fields.payload) then
    ending.finish_bare(id, 'error', 'invalid_request', 'request: its hash was deleted while it ran')
    ended = ended + 1
  elseif requests.is_final(fields.state) then
    requests.drop_holds(id, fields.tenant)
  elseif fields.cancelled == '1' then
    ending.finish_bare(id, 'cancelled')
    ended = ended + 1
  elseif not crashes.may_live(id, max_crashes) then
    if crashes.count(id, fields.score, max_crashes) == 'dead' then dead = dead + 1
    else returned = returned + 1 end
  end
end
server.carry_out() -- a request that has just ended has no deadline
for _, id in ipairs(server.due(keys.deadlines, server.now_text, limit)) do
  local is_held = redis.call('ZSCORE', keys.leases, id) -- its worker ends it
  if not is_held and ending.finish_bare(id, 'expired') then ended = ended + 1 end
end
if dead_ttl > 0 then
  for _, id in ipairs(server.due(keys.dead, numbers.exact(server.now - dead_ttl), limit)) do
    if requests.purge(id) then purged = purged + 1 end
  end
end
server.carry_out()
if returned > 0 then server.wake_workers() end
return {returned, ended, dead, purged}
