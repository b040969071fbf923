// What a training keeps in the browser (IndexedDB), under the number of the site's content.

const NAME = 'onnx-backprop', STORE = 'trainings';

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function open() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE);
  return done(request);
}

async function inStore(mode, use) {
  const database = await open();
  try {
    const transaction = database.transaction(STORE, mode);
    const complete = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const [result] = await Promise.all([done(use(transaction.objectStore(STORE))), complete]);
    return result;
  } finally {
    database.close();
  }
}

export const load = (id) => inStore('readonly', (store) => store.get(id));
export const save = (id, record) => inStore('readwrite', (store) => store.put(record, id));
export const forget = (id) => inStore('readwrite', (store) => store.delete(id));
