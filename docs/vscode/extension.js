// Starts `mbc lsp` and lets it answer for all sources (.mbc).
"use strict";

const { commands, window, workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

async function start() {
  const settings = workspace.getConfiguration("mbc");
  const [command, ...args] = settings.get("command");
  client = new LanguageClient(
    "mbc",
    "mbc",
    { command, args },
    { documentSelector: [{ language: "mbc" }], initializationOptions: { gpu: settings.get("gpu") } },
  );
  try {
    await client.start();
  } catch (error) {
    window.showErrorMessage(`mbc: ${command} does not start (pip install 'mbc-compiler[lsp]'): ${error.message}`);
  }
}

async function stop() {
  if (client?.isRunning()) await client.stop();
  client = undefined;
}

async function restart() {
  await stop();
  await start();
}

async function activate(context) {
  context.subscriptions.push(
    commands.registerCommand("mbc.restart", restart),
    workspace.onDidChangeConfiguration((change) => change.affectsConfiguration("mbc") && restart()),
  );
  await start();
}

module.exports = { activate, deactivate: stop };
