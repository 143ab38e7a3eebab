// Runs before the page is drawn, so that a chosen theme does not flash up in the other one.
"use strict";
{
  const chosen = localStorage.getItem("promptq-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
