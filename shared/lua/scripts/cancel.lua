-- uses: keys, server, requests, pending, ending
-- Cancel requests. A waiting one ends now. A running one is flagged, and its worker is notified.
-- ARGV  1 'any'; 'waiting': not requests that a worker holds; 'flagged': only waiting requests that a plain
--         client has flagged; then ids
-- Reply a status for each: cancelled (ended now), flagged (its worker ends it), active (left alone),
--       finished (was over before), unknown

local mode = ARGV[1]

local function cancel(id)
  local fields = requests.read(id, 'state', 'payload', 'cancelled', 'tenant') or {}
  local queue = pending.queue_of(id, fields.tenant)
  if requests.is_final(fields.state) then
    requests.drop_holds(id, fields.tenant) -- a stranger may have put it into a queue again
    if queue then server.remove_later(queue, id) end
    return 'finished'
  end
  if mode == 'flagged' and fields.cancelled ~= '1' then return 'active' end
  if redis.call('ZSCORE', keys.leases, id) then
    if queue then redis.call('ZREM', queue, id) end
    redis.pcall('ZREM', keys.delayed, id)
    if mode ~= 'any' then return 'active' end
    redis.call('HSET', keys.request(id), 'cancelled', '1')
    redis.call('PUBLISH', keys.channels .. 'control', 'cancel:' .. id)
    return 'flagged'
  end
  if queue or server.score_in(keys.delayed, id) or fields.payload then
    if queue then server.remove_later(queue, id) end
    redis.pcall('HSET', keys.request(id), 'cancelled', '1')
    ending.finish_bare(id, 'cancelled')
    return 'cancelled'
  end
  -- A plain client flagged a request that was never enqueued, or not yet.
  if fields.cancelled then redis.call('PEXPIRE', keys.request(id), ending.result_ttl()) end
  return 'unknown'
end

local statuses = {}
server.write_needs_no_memory()
for n = 2, #ARGV do statuses[n - 1] = cancel(ARGV[n]) end
server.carry_out()
return statuses
