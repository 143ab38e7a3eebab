-- Numbers are text in keys, fields and payloads.

-- A whole number as text. Lua would print large ones as 1.2e+15; keys and scores need every digit.
function numbers.exact(number) return string.format('%.0f', number) end

-- A number as text with its fraction.
function numbers.precise(number) return string.format('%.17g', number) end

-- A field as a whole number, or the default if it is missing or a stranger wrote something else.
function numbers.whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- The number of this name in a payload's JSON, found without decoding. A JSON string has no bare quotes, so a
-- match is a name. It may be in a nested object, so the number is only an estimate. Searching with a pattern
-- would try each of up to 8 million bytes.
function numbers.in_json(payload, name)
  local key, stop = '"' .. name .. '"', 0
  while stop do
    local number = stop > 0 and string.match(payload, '^%s*:%s*(-?%d+)', stop + 1)
    if number then return tonumber(number) end
    stop = select(2, string.find(payload, key, stop + 1, true))
  end
end
