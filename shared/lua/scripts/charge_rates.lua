-- uses: server, rate_buckets
-- Take amounts from the rates of one holder, all of them or none.
-- ARGV  1 holder   then for each rate: name, amount, limit a minute
-- Reply {milliseconds to wait, or 0 if all was taken, or -1 if an amount is more than its limit;
--        for each rate: the amount left, milliseconds until the whole limit is available}

local key = rate_buckets.key(ARGV[1])
local wait, wanted, reply = 0, {}, {}
server.write_needs_no_memory()
for at = 2, #ARGV, 3 do
  local name, amount, limit = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local before = rate_buckets.full_at(key, name)
  local after = rate_buckets.full_after(before, amount, limit)
  if amount > limit then wait = -1
  elseif wait >= 0 then wait = math.max(wait, math.ceil(after - server.now - rate_buckets.MINUTE)) end
  wanted[#wanted + 1] = {name = name, before = before, after = after, limit = limit}
end
for _, rate in ipairs(wanted) do
  local full = wait == 0 and rate.after or rate.before
  if wait == 0 then rate_buckets.set_full_at(redis.call, key, rate.name, full) end
  reply[#reply + 1] = math.max(0, math.floor(rate.limit * (1 - (full - server.now) / rate_buckets.MINUTE)))
  reply[#reply + 1] = math.ceil(full - server.now)
end
return {wait, unpack(reply)}
