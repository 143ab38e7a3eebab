-- Run a dead letter again, as a new request. It stays a suspect, so that it harms nobody else.
-- KEYS  1 pending
-- ARGV  1 id of the dead letter   2 id of the new request
-- Reply {'ok'}      also where that was done before: a call that is sent again because its reply was lost
--       {'unknown'} there is no such dead letter
--       {'exists'}  the new id is taken

local old, new = ARGV[1], ARGV[2]
local fields = read_request(old, 'payload', 'priority', 'tenant', 'account')
if (read_request(new, 'requeued_from') or {}).requeued_from == old then return {'ok'} end
if not redis.call('ZSCORE', prefix .. 'dead', old) or not fields then return {'unknown'} end
if redis.call('EXISTS', request_key(new)) == 1 then return {'exists'} end
write_needs_memory()
local priority = whole(fields.priority) or number_in(fields.payload, 'priority') or 0
local score, tokens = exact(score_of(priority)), estimated_tokens(fields.payload)
redis.call('HSET', request_key(new), 'payload', fields.payload, 'state', 'waiting', 'score', score,
  'priority', priority, 'enqueued_at', exact(now), 'requeued_from', old, 'suspect', 1,
  'tokens', exact(tokens))
if fields.tenant then redis.call('HSET', request_key(new), 'tenant', fields.tenant) end
if fields.account then redis.call('HSET', request_key(new), 'account', fields.account) end
put_waiting(new, score, fields.tenant)
count_later('tokens', tenant_name(fields.tenant), tokens)
redis.call('ZREM', prefix .. 'dead', old)
redis.call('PEXPIRE', request_key(old), result_ttl())
carry_out()
wake_workers()
return {'ok'}
