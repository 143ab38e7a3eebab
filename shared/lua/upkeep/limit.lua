-- Take from the rates of one holder, all of them or none.
-- KEYS  1 pending
-- ARGV  1 holder   then for each rate: name, amount, limit a minute
-- Reply {milliseconds to wait, or 0 where all was taken, or -1 where it never can be;
--        for each rate: how much is left, milliseconds until all of it is back}
-- Each rate is a bucket that holds a minute's worth and fills evenly (generic cell rate algorithm, ATM
-- Forum TM 4.0): what is stored is the time at which it is full again.

local MINUTE = 60000
local key = prefix .. 'rate:' .. ARGV[1]
local wait, full_at, reply = 0, {}, {}
write_needs_memory()
for at = 2, #ARGV, 3 do
  local name, amount, limit = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local before = math.max(now, tonumber(redis.call('HGET', key, name) or 0))
  local after = before + amount * MINUTE / limit
  if amount > limit then wait = -1
  elseif wait >= 0 then wait = math.max(wait, math.ceil(after - now - MINUTE)) end
  full_at[#full_at + 1] = {name = name, before = before, after = after, limit = limit}
end
for _, rate in ipairs(full_at) do
  local full = wait == 0 and rate.after or rate.before
  if wait == 0 then redis.call('HSET', key, rate.name, exact(math.ceil(full))) end
  reply[#reply + 1] = math.max(0, math.floor(rate.limit * (1 - (full - now) / MINUTE)))
  reply[#reply + 1] = math.ceil(full - now)
end
if wait == 0 then redis.call('PEXPIRE', key, MINUTE) end
return {wait, unpack(reply)}
