package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// environment is an ordered set of variables; the last value of a name wins
// and stays at its first place.
type environment struct {
	names  []string
	values map[string]string
}

func (e *environment) set(name, value string) {
	if e.values == nil {
		e.values = map[string]string{}
	}
	if _, ok := e.values[name]; !ok {
		e.names = append(e.names, name)
	}
	e.values[name] = value
}

func (e *environment) list() []string {
	out := make([]string, 0, len(e.names))
	for _, n := range e.names {
		out = append(out, n+"="+e.values[n])
	}
	return out
}

// expand replaces $(NAME) by a variable that is known so far; $$ is a
// literal $, and what is unknown stays as it is written.
func (e *environment) expand(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString(s[i:])
				return b.String()
			}
			name := s[i+2 : i+end]
			if v, ok := e.values[name]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}

// resolveEnv computes a container's environment from the node's own copy of
// what it refers to.
func resolveEnv(pod *corev1.Pod, c *corev1.Container, base [][2]string, src volumes.Source, f volumes.Facts) (*environment, error) {
	e := &environment{}
	for _, kv := range base {
		e.set(kv[0], kv[1])
	}
	for i := range c.EnvFrom {
		if err := e.from(pod.Namespace, &c.EnvFrom[i], src); err != nil {
			return nil, configError(err)
		}
	}
	for i := range c.Env {
		v := &c.Env[i]
		if v.ValueFrom == nil {
			e.set(v.Name, e.expand(v.Value))
			continue
		}
		value, ok, err := envValue(pod, c, v.ValueFrom, src, f)
		if err != nil {
			return nil, configError(fmt.Errorf("variable %s: %w", v.Name, err))
		}
		if ok {
			e.set(v.Name, value)
		}
	}
	return e, nil
}

func (e *environment) from(ns string, from *corev1.EnvFromSource, src volumes.Source) error {
	data := map[string]string{}
	switch {
	case from.ConfigMapRef != nil:
		r := from.ConfigMapRef
		cm, ok := src.ConfigMap(ns, r.Name)
		if !ok {
			return missing("ConfigMap", ns, r.Name, "", r.Optional)
		}
		data = cm.Data
	case from.SecretRef != nil:
		r := from.SecretRef
		s, ok := src.Secret(ns, r.Name)
		if !ok {
			return missing("Secret", ns, r.Name, "", r.Optional)
		}
		for k, v := range s.Data {
			data[k] = string(v)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(data)) {
		if name := from.Prefix + k; !strings.ContainsAny(name, "=\x00") {
			e.set(name, data[k])
		}
	}
	return nil
}

func missing(kind, ns, name, key string, optional *bool) error {
	if optional != nil && *optional {
		return nil
	}
	return &volumes.MissingError{Kind: kind, Namespace: ns, Name: name, Key: key}
}

// envValue resolves one valueFrom; ok is false for an optional one that is
// not there.
func envValue(pod *corev1.Pod, c *corev1.Container, from *corev1.EnvVarSource, src volumes.Source, f volumes.Facts) (value string, ok bool, err error) {
	switch {
	case from.FieldRef != nil:
		value, err = volumes.Field(pod, from.FieldRef.FieldPath, f)
		return value, err == nil, err
	case from.ResourceFieldRef != nil:
		value, err = volumes.Resource(pod, c.Name, from.ResourceFieldRef, f)
		return value, err == nil, err
	case from.ConfigMapKeyRef != nil:
		r := from.ConfigMapKeyRef
		cm, found := src.ConfigMap(pod.Namespace, r.Name)
		if !found {
			return "", false, missing("ConfigMap", pod.Namespace, r.Name, "", r.Optional)
		}
		if v, ok := cm.Data[r.Key]; ok {
			return v, true, nil
		}
		return "", false, missing("ConfigMap", pod.Namespace, r.Name, r.Key, r.Optional)
	case from.SecretKeyRef != nil:
		r := from.SecretKeyRef
		s, found := src.Secret(pod.Namespace, r.Name)
		if !found {
			return "", false, missing("Secret", pod.Namespace, r.Name, "", r.Optional)
		}
		if v, ok := s.Data[r.Key]; ok {
			return string(v), true, nil
		}
		return "", false, missing("Secret", pod.Namespace, r.Name, r.Key, r.Optional)
	}
	return "", false, errors.New("this kind of valueFrom is not supported")
}

func configError(err error) error {
	return &workload.StartError{Reason: "CreateContainerConfigError", Message: err.Error(), Err: err}
}
