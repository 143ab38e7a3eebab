-- uses: priority_counts
-- Count the requests of all tenants that wait at each priority. Changes nothing.
-- Reply {how many wait, priority, how many, priority, how many, ...}; if more than some hundreds wait, the
--       counts of the single priorities are estimates

local total, counts = priority_counts.count()
local reply = {total}
for priority, num in pairs(counts) do
  reply[#reply + 1] = priority
  reply[#reply + 1] = num
end
return reply
