// The page: the race and the chat, one view at a time.

import "./race.js";
import "./chat/chat.js";
import "./learn.js";
import { startTabs } from "./tabs.js";

startTabs();
