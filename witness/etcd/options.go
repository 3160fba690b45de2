package etcd

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"
)

// Options say which etcd, and how to speak to it.
type Options struct {
	Endpoints   []string // host:port, without a scheme
	Prefix      string   // of the keys (default serry)
	User        string
	Password    string
	Secure      bool          // TLS; so do the next three
	CACert      string        // file with the CA of the etcd's certificate (default: the system's)
	Cert, Key   string        // files of the client's certificate
	TTL         time.Duration // after which the register of a world without members expires (default 24 h, at least 4 s)
	DialTimeout time.Duration // default 5 s; also for questions that have no deadline

	tls *tls.Config
}

// Parse reads a URL; see the package comment.
func Parse(s string) (o Options, err error) {
	bad := func(f string, a ...any) (Options, error) {
		return Options{}, fmt.Errorf("witness: %s: %s; want etcd://host:2379,host2:2379/prefix?option=value", hide(s), fmt.Sprintf(f, a...))
	}
	scheme, rest, _ := strings.Cut(s, "://")
	switch scheme {
	case "etcd":
	case "etcds":
		o.Secure = true
	default:
		return bad("the scheme is etcd or etcds")
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, prefix, _ := strings.Cut(rest, "/")
	if who, where, ok := strings.Cut(hosts, "@"); ok {
		name, pass, _ := strings.Cut(who, ":")
		if o.User, err = url.PathUnescape(name); err != nil {
			return bad("the user's name cannot be read")
		}
		if o.Password, err = url.PathUnescape(pass); err != nil {
			return bad("the password cannot be read")
		}
		hosts = where
	}
	o.Prefix = strings.Trim(prefix, "/")
	for h := range strings.SplitSeq(hosts, ",") {
		if h == "" {
			continue
		}
		if _, _, err := net.SplitHostPort(h); err != nil {
			h = net.JoinHostPort(strings.Trim(h, "[]"), "2379")
		}
		o.Endpoints = append(o.Endpoints, h)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return bad("the options cannot be read")
	}
	for name, vs := range values {
		v := vs[len(vs)-1]
		switch name {
		case "user":
			o.User = v
		case "password-file":
			b, err := os.ReadFile(v)
			if err != nil {
				return bad("the password: %v", err)
			}
			o.Password = strings.TrimRight(string(b), "\r\n")
		case "cacert":
			o.CACert = v
		case "cert":
			o.Cert = v
		case "key":
			o.Key = v
		case "ttl":
			if o.TTL, err = time.ParseDuration(v); err != nil {
				return bad("ttl=%s is no time such as 24h", v)
			}
		default:
			return bad("there is no option %q: user, password-file, cacert, cert, key and ttl are", name)
		}
	}
	_, err = o.complete()
	return o, err
}

// hide takes the password out of a URL.
func hide(s string) string {
	scheme, rest, _ := strings.Cut(s, "://")
	hosts, tail, _ := strings.Cut(rest, "/")
	if who, where, ok := strings.Cut(hosts, "@"); ok {
		name, _, _ := strings.Cut(who, ":")
		s = scheme + "://" + name + ":...@" + where
		if tail != "" {
			s += "/" + tail
		}
	}
	return s
}

func (o *Options) scheme() string {
	if o.tls != nil {
		return "https://"
	}
	return "http://"
}

// complete fills in what is not given, reads the certificates, and refuses what makes no sense.
func (o Options) complete() (Options, error) {
	switch {
	case len(o.Endpoints) == 0:
		return o, errors.New("witness: no endpoint of the etcd is given: etcd://host:2379")
	case o.TTL != 0 && o.TTL < 4*time.Second:
		return o, fmt.Errorf("witness: a ttl of %v: at least 4s, better some hours: it is how long the members may be without the etcd", o.TTL)
	case (o.Cert == "") != (o.Key == ""):
		return o, errors.New("witness: cert and key come together")
	case o.Password != "" && o.User == "":
		return o, errors.New("witness: a password without a user")
	}
	if o.Prefix = strings.Trim(o.Prefix, "/"); o.Prefix == "" {
		o.Prefix = "serry"
	}
	if o.TTL == 0 {
		o.TTL = 24 * time.Hour
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = 5 * time.Second
	}
	if !o.Secure && o.CACert == "" && o.Cert == "" {
		return o, nil
	}
	o.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CACert != "" {
		pem, err := os.ReadFile(o.CACert)
		if err != nil {
			return o, fmt.Errorf("witness: cacert: %w", err)
		}
		o.tls.RootCAs = x509.NewCertPool()
		if !o.tls.RootCAs.AppendCertsFromPEM(pem) {
			return o, fmt.Errorf("witness: cacert: %s has no certificate in PEM", o.CACert)
		}
	}
	if o.Cert != "" {
		c, err := tls.LoadX509KeyPair(o.Cert, o.Key)
		if err != nil {
			return o, fmt.Errorf("witness: cert and key: %w", err)
		}
		o.tls.Certificates = []tls.Certificate{c}
	}
	return o, nil
}
