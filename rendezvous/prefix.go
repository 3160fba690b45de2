package rendezvous

import "context"

// Prefix returns a view of store in which every key has prefix and a slash before it, so that two users of one store do
// not meet. Closing it closes store. An empty prefix returns store itself.
func Prefix(store Store, prefix string) Store {
	if prefix == "" {
		return store
	}
	return &prefixed{store, prefix + "/"}
}

type prefixed struct {
	store  Store
	prefix string
}

func (p *prefixed) key(key string) (string, error) {
	if key == "" {
		return "", &Error{Store: "with prefix " + p.prefix, Op: "use", Err: checkKey("")}
	}
	return p.prefix + key, nil
}

func (p *prefixed) Get(ctx context.Context, key string) ([]byte, error) {
	k, err := p.key(key)
	if err != nil {
		return nil, err
	}
	return p.store.Get(ctx, k)
}

func (p *prefixed) Set(ctx context.Context, key string, value []byte) error {
	k, err := p.key(key)
	if err != nil {
		return err
	}
	return p.store.Set(ctx, k, value)
}

func (p *prefixed) Wait(ctx context.Context, keys ...string) error {
	full := make([]string, len(keys))
	for i, key := range keys {
		k, err := p.key(key)
		if err != nil {
			return err
		}
		full[i] = k
	}
	return p.store.Wait(ctx, full...)
}

func (p *prefixed) Add(ctx context.Context, key string, delta int64) (int64, error) {
	k, err := p.key(key)
	if err != nil {
		return 0, err
	}
	return p.store.Add(ctx, k, delta)
}

func (p *prefixed) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	k, err := p.key(key)
	if err != nil {
		return nil, err
	}
	return p.store.CompareAndSet(ctx, k, expected, desired)
}

func (p *prefixed) Close() error { return p.store.Close() }
