-- uses: priority_counts
-- Count the requests of all tenants that wait at each priority. Changes nothing.
-- Reply {how many wait, priority, how many, priority, how many, ...}; if a tenant has more waiting requests than
--       1,000 divided by the number of tenants, the counts of the priorities are estimates

local total, counts = priority_counts.count()
local reply = {total}
for priority, num in pairs(counts) do
  reply[#reply + 1] = priority
  reply[#reply + 1] = num
end
return reply
