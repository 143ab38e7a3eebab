-- uses: pending
-- List the requests of all tenants that wait. Changes nothing.
-- ARGV  1 how many ids from the front of each tenant's queue   2 an id to look for ('' for none)
-- Reply {how many wait, 1 if the id waits else 0, id, ...}, the ids in the order of their scores

local limit, wanted = tonumber(ARGV[1]), ARGV[2]
local num, found, entries = 0, 0, {}
for _, key in ipairs(pending.queues()) do
  num = num + redis.call('ZCARD', key)
  if wanted ~= '' and redis.call('ZSCORE', key, wanted) then found = 1 end
  local page = limit > 0 and redis.call('ZRANGE', key, 0, limit - 1) or {}
  local scores = #page > 0 and redis.call('ZMSCORE', key, unpack(page))
  for i, id in ipairs(page) do entries[#entries + 1] = {tonumber(scores[i]), id} end
end
table.sort(entries, function(one, other)
  return one[1] < other[1] or one[1] == other[1] and one[2] < other[2]
end)
local reply = {num, found}
for i = 1, math.min(limit, #entries) do reply[#reply + 1] = entries[i][2] end
return reply
