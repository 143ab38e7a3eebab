-- uses: keys, numbers, server, pictures, requests, scores, pending, ending
-- Run a dead letter again, as a new request. It stays a suspect and runs alone, so it harms no other request.
-- ARGV  1 id of the dead letter   2 id of the new request
-- Reply {'ok'}      also if it was done before and the call is sent again because its reply was lost
--       {'unknown'} there is no such dead letter
--       {'exists'}  the new id is taken; an error if no request may have it

local old, new = ARGV[1], ARGV[2]
local wrong = requests.wrong_id(new)
if wrong then return redis.error_reply('ERR ' .. wrong) end
local fields = requests.read(old, 'payload', 'priority', 'tenant', 'account', 'pictures')
if (requests.read(new, 'requeued_from') or {}).requeued_from == old then return {'ok'} end
if not redis.call('ZSCORE', keys.dead, old) or not fields then return {'unknown'} end
if redis.call('EXISTS', keys.request(new)) == 1 then return {'exists'} end
server.write_needs_memory()
local priority = numbers.whole(fields.priority) or numbers.in_json(fields.payload, 'priority') or 0
local score, tokens = numbers.exact(scores.at_arrival(priority)), requests.estimated_tokens(fields.payload)
redis.call('HSET', keys.request(new), 'payload', fields.payload, 'state', 'waiting', 'score', score,
  'priority', priority, 'enqueued_at', server.now_text, 'requeued_from', old, 'suspect', 1,
  'tokens', numbers.exact(tokens))
if fields.tenant then redis.call('HSET', keys.request(new), 'tenant', fields.tenant) end
if fields.account then redis.call('HSET', keys.request(new), 'account', fields.account) end
if fields.pictures then redis.call('HSET', keys.request(new), 'pictures', fields.pictures) end
pictures.keep(new, fields.pictures)
pictures.let_go(old, fields.pictures, ending.result_ttl())
pending.put(new, score, fields.tenant)
pending.count_later('tokens', fields.tenant, tokens)
redis.call('ZREM', keys.dead, old)
redis.call('PEXPIRE', keys.request(old), ending.result_ttl())
server.carry_out()
server.wake_workers()
return {'ok'}
