//go:build bench

package bench

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func registryKind(k string) schema.GroupKind { return schema.GroupKind{Kind: k} }

func replaceStatus(n *corev1.Node) registry.Mutate {
	return func(cur runtime.Object) (runtime.Object, error) {
		o := cur.(*corev1.Node)
		o.Status = n.Status
		return o, nil
	}
}
