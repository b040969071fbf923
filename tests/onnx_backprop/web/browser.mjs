// node browser.mjs PUPPETEER CHROMIUM FOLDER URLS: what a visitor does with the pages, in Chromium; prints JSON.
// URLS: {name: url} of the sites that browser.py serves. FOLDER: where downloads and screenshots go.
import { pathToFileURL } from 'node:url';

const [puppeteerFile, executablePath, folder, urls] = process.argv.slice(2);
const { default: puppeteer } = await import(pathToFileURL(puppeteerFile));
const site = JSON.parse(urls), found = { errors: [] };
const launch = (...more) => puppeteer.launch({
  executablePath, headless: true, protocolTimeout: 500000, args: ['--no-sandbox', '--disable-dev-shm-usage', ...more],
});
let browser = await launch();

async function open(url, width = 1280) {
  const page = await browser.newPage();
  page.on('pageerror', (e) => found.errors.push(`${url}: ${e.message}`));
  await page.setViewport({ width, height: 900 });
  await page.goto(url);
  return page;
}
const stage = (name) => console.error(name);
const text = (page, id) => page.$eval(`#${id}`, (e) => e.textContent);
const step = async (page) => Number((await text(page, 'steps')).replace(/\D/g, ''));
const ready = (page) => page.waitForFunction(() => !document.getElementById('run').disabled, { timeout: 120000 });
const until = (page, condition, ...values) => page.waitForFunction(condition, { timeout: 200000 }, ...values);
const atStep = (page, n) => until(page, (n) => Number(document.getElementById('steps').textContent.replace(/\D/g, '')) >= n, n);
const trouble = async (page) => {
  await until(page, () => !document.getElementById('trouble').hidden);
  return text(page, 'trouble');
};
const status = (page, start) => until(page, (start) => document.getElementById('status').textContent.startsWith(start), start);
const press = (page, id = 'run') => page.click(`#${id}`);
const fill = (page, id, value) => page.$eval(`#${id}`, (e, v) => { e.value = v; e.dispatchEvent(new Event('change')); }, value);
const results = async (page, count) => {
  await until(page, (n) => document.querySelectorAll('#results li').length >= n, count);
  return page.$$eval('#results li p', (all) => all.map((p) => p.textContent).reverse());
};

stage("20 steps of three networks, to be compared with Python's");
found.losses = {};
async function losses(name, steps) {
  const page = await open(site[name] + 'site.json'); // without the page's own worker
  found.losses[name] = await page.evaluate(async (steps) => {
    const about = await (await fetch('site.json')).json(), read = async (f) => (await fetch(f)).arrayBuffer();
    const [{ Trainer }, { Rows }, ort] = await Promise.all(['./trainer.js', './rows.js', about.runtime].map((f) => import(new URL(f, location.href))));
    ort.env.wasm.numThreads = 1;
    ort.env.logLevel = 'error';
    const rows = new Rows(about.data, await read('data.bin'));
    const trainer = await Trainer.create(ort, (f) => read(`model/${f}`), about.session ?? {});
    trainer.learningRate = about.learningRate;
    const losses = [];
    for (let i = 0; i < steps; i++) losses.push(await trainer.step(rows.batch(Array.from({ length: about.batch }, (_, k) => i * about.batch + k))));
    return losses;
  }, steps);
  await page.close();
}
const networks = ['cnn', 'unet_conv_transpose', 'unet_resize'];
for (const name of networks) await losses(name, 20);

stage("training, a reload in the middle, a pause, a reload of that");
let page = await open(site.digits);
await ready(page);
found.isolated = await page.evaluate(() => crossOriginIsolated);
found.readySaid = await text(page, 'status');
await press(page);
await atStep(page, 60);
await until(page, () => document.getElementById('accuracy').textContent !== '–');
const seen = await step(page);
await new Promise((resolve) => setTimeout(resolve, 2500)); // longer than between savings, so that what was seen is kept
found.beforeReload = seen;
await page.reload();
await until(page, () => document.getElementById('run').textContent === 'Pause'); // it goes on by itself
await until(page, (n) => Number(document.getElementById('steps').textContent.replace(/\D/g, '')) > n, 10);
found.afterReload = await step(page);
await atStep(page, 500);
await page.screenshot({ path: `${folder}/page-1280.png` });
await press(page);
await status(page, 'Paused');
found.paused = await step(page);
await page.reload();
await ready(page);
found.resumed = await step(page);
found.resumedSaid = await text(page, 'status');

stage("pictures of one's own, a file that is none");
const input = await page.$('#files');
await input.uploadFile(`${folder}/digit.png`, `${folder}/no-picture.png`);
found.pictures = await results(page, 2);

stage("the download");
const session = await browser.target().createCDPSession();
await session.send('Browser.setDownloadBehavior', { behavior: 'allow', downloadPath: folder, eventsEnabled: true });
const downloaded = new Promise((resolve) => session.on('Browser.downloadProgress', (e) => e.state === 'completed' && resolve()));
await press(page, 'save');
await downloaded;

await page.setViewport({ width: 400, height: 900 });
await new Promise((resolve) => setTimeout(resolve, 500));
await page.screenshot({ path: `${folder}/page-400.png`, fullPage: true });
await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: 'dark' }]);
await page.screenshot({ path: `${folder}/page-400-dark.png`, fullPage: true });
found.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
await page.setViewport({ width: 1280, height: 900 });
found.nameless = await page.evaluate(() => [...document.querySelectorAll('button, input')]
  .filter((e) => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).map((e) => e.id));

stage("wrong numbers");
await fill(page, 'rate', '-1');
found.badRate = await trouble(page);
await fill(page, 'rate', '1e30');
await press(page);
await until(page, () => document.getElementById('trouble').textContent.startsWith('The training has stopped'));
found.diverged = await trouble(page);
await fill(page, 'rate', '0.001');

stage("two tabs");
const second = await open(site.digits);
await status(second, 'This training is open in another tab');
found.secondTab = await text(second, 'status');
found.secondDisabled = await second.$eval('#run', (e) => e.disabled);
const stood = await step(page);
await page.close();
await ready(second);
found.takenOver = [stood, await step(second)];
page = second;

stage("a worker that is ended");
await fill(page, 'rate', '0.001');
await press(page);
await atStep(page, found.takenOver[1] + 20);
await new Promise((resolve) => setTimeout(resolve, 2500));
page.workers().find((w) => w.url().endsWith('/worker.js')).evaluate(() => self.close()).catch(() => {}); // no answer comes
found.lostWorker = await trouble(page);
found.lostAt = await step(page);
await press(page);
await until(page, () => document.getElementById('run').textContent === 'Pause');
found.foundAt = await step(page);
await press(page);
await status(page, 'Paused');

stage("anew");
await press(page, 'anew');
await page.click('#sure button[value=yes]');
await until(page, () => document.getElementById('steps').textContent === '0');
await ready(page);
await page.reload();
await ready(page);
found.anew = await step(page);
await page.close();

stage("a label that there is not");
page = await open(site.labels);
await ready(page);
await press(page);
found.label = await trouble(page);
found.labelKept = await step(page);
await page.reload();
await ready(page);
found.labelAfter = await step(page);
await page.close();

stage("more memory than there is");
page = await open(site.memory);
await ready(page);
await fill(page, 'batch', '2');
await press(page);
await atStep(page, 1);
await press(page);
await status(page, 'Paused');
found.memoryStood = await step(page);
await fill(page, 'batch', '40');
await press(page);
found.memory = await trouble(page);
await ready(page);
found.memoryKept = await step(page);
await fill(page, 'batch', '2');
await press(page);
await atStep(page, found.memoryKept + 1);
await page.close();

stage("tables");
page = await open(site.table);
await ready(page);
await (await page.$('#files')).uploadFile(...['rows', 'answers', 'text', 'wide'].map((name) => `${folder}/${name}.csv`));
found.tables = await results(page, 4);
await page.close();

stage("a folder that is not whole");
page = await open(site.broken);
found.broken = await trouble(page);
await page.close();

await browser.close();

stage('the first steps on WebGPU, whose adapter is SwiftShader, a minute or two each');
browser = await launch('--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan', '--use-vulkan=swiftshader');
for (const name of networks) await losses(`${name}_webgpu`, 5);
await browser.close();
console.log(JSON.stringify(found));
