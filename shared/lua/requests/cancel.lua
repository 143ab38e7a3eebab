-- Cancel requests: one that waits ends now, one that runs is flagged and its worker told.
-- KEYS  1 pending
-- ARGV  1 'any'; 'waiting' to leave alone what a worker holds; 'flagged' to end only what waits and
--         bears the flag already (a plain client set it); then ids
-- Reply a status for each: cancelled (ended now), flagged (its worker ends it), active (left alone),
--       finished (was over before), unknown

local mode = ARGV[1]
local statuses = {}
write_needs_no_memory()
for n = 2, #ARGV do
  local id = ARGV[n]
  local fields = read_request(id, 'state', 'payload', 'cancelled', 'tenant') or {}
  local queue = queue_of(id, fields.tenant)
  local status
  if is_final(fields.state) then
    drop_holds(id, fields.tenant) -- a stranger may have put it into a queue again
    if queue then remove_later(queue, id) end
    status = 'finished'
  elseif mode == 'flagged' and fields.cancelled ~= '1' then
    status = 'active'
  elseif redis.call('ZSCORE', leases, id) then
    if queue then redis.call('ZREM', queue, id) end
    redis.pcall('ZREM', delayed, id)
    status = 'active'
    if mode == 'any' then
      status = 'flagged'
      redis.call('HSET', request_key(id), 'cancelled', '1')
      redis.call('PUBLISH', control, 'cancel:' .. id)
    end
  elseif queue or score_in(delayed, id) or fields.payload then
    if queue then remove_later(queue, id) end
    redis.pcall('HSET', request_key(id), 'cancelled', '1')
    finish_bare(id, 'cancelled')
    status = 'cancelled'
  else
    status = 'unknown'
    -- A plain client's flag for what was never enqueued, or not yet.
    if fields.cancelled then redis.call('PEXPIRE', request_key(id), result_ttl()) end
  end
  statuses[#statuses + 1] = status
end
carry_out()
return statuses
